"""Groups are paired by the names of their parameters."""

import pytest

from orlop.state.pairing import pair_groups
from orlop.state.policy import LoadPolicy

STRICT = LoadPolicy()
LENIENT = LoadPolicy(allow_missing=True, allow_unexpected=True)


def verdicts(pairing):
    return [(finding.verdict, finding.detail) for finding in pairing.findings]


def test_groups_match_by_the_set_of_names():
    assert pair_groups([["a"], ["b", "c"], []], [["c", "b"], [], ["a"]], "o", STRICT).order == (2, 0, 1)
    assert pair_groups([[], []], [[], []], "o", STRICT).order == (0, 1)
    # A live group without parameters takes nothing where none was saved.
    assert pair_groups([["a"], []], [["a"]], "o", STRICT).order == (0, None)


@pytest.mark.parametrize("policy", [STRICT, LENIENT], ids=["strict", "lenient"])
@pytest.mark.parametrize(
    "live, saved",
    [
        ([["a"], ["b"]], [["a", "b"]]),
        ([["a", "b"]], [["a"], ["b"]]),
        ([["a", "b"], ["c"]], [["a"], ["b", "c"]]),
        ([["a", "new"], ["b"]], [["a", "b", "gone"]]),
        ([["a"]], [["a"], []]),
    ],
)
def test_groups_that_are_cut_otherwise_are_a_fault_with_both_sides(live, saved, policy):
    pairing = pair_groups(live, saved, "o.param_groups", policy)
    assert pairing.order is None
    finding = pairing.findings[-1]
    assert (finding.verdict, finding.leaf) == ("groups", "o.param_groups")
    assert finding.detail.count("group 0: ") == 2


def test_parameters_of_one_side_are_all_named_and_the_policy_lets_them_be():
    live, saved = [["a", "x", "y"], ["z"]], [["a", "p"], ["q"]]
    strict = pair_groups(live, saved, "o", STRICT)
    assert verdicts(strict) == [
        ("missing", "not in its groups: x, y, z"),
        ("unexpected", "only in its groups: p, q"),
    ]
    lenient = pair_groups(live, saved, "o", LENIENT)
    assert lenient.order == (0, None)
    assert [finding.verdict for finding in lenient.findings] == ["kept", "ignored"]
    only_missing = pair_groups(live, saved, "o", LoadPolicy(allow_missing=True))
    assert [finding.verdict for finding in only_missing.findings] == ["kept", "unexpected"]


def test_positions_are_no_names():
    # Numbers never are, even where the model's own names are digits (an nn.ParameterList).
    for live, saved in (("a", "0"), ("a", 0), ("0", 0)):
        pairing = pair_groups([[live]], [[saved]], "o", LENIENT)
        assert pairing.order is None
        assert [finding.verdict for finding in pairing.findings] == ["layout"]
    assert pair_groups([["1"], ["0"]], [["0"], ["1"]], "o", STRICT).order == (1, 0)
