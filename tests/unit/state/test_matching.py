"""Names of two sides: which prefix would make them meet."""

import pytest

from orlop.state.matching import check_model_layout, nearest_prefix


@pytest.mark.parametrize(
    "there, prefix",
    [
        (["run.a.w", "run.b.w", "x.b.w"], "run."),
        (["a.w"], None),  # the same name: no prefix
        (["a.v"], None),
        ([], None),
    ],
)
def test_the_nearest_prefix_is_what_most_names_have(there, prefix):
    assert nearest_prefix(["a.w", "b.w"], there) == prefix


def test_a_model_of_which_nothing_is_there_is_told_what_is():
    assert check_model_layout("model.", ["a.w"], ["model.a.w"]) is None
    assert check_model_layout("model.", [], ["x"]) is None
    finding = check_model_layout("model.", ["a.w"], ["run.model.a.w"])
    assert finding.verdict == "layout"
    assert "key_prefix='run.'" in finding.detail
    assert "'net.' where 'model.' is expected" in check_model_layout("model.", ["a.w"], ["net.a.w"]).detail
