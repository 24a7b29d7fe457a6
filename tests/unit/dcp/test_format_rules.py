"""Each rule of docs/format.md has a test with an input that breaks it: here it says which."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HERE = "tests/unit/dcp"

TESTS = {
    "S1": (f"{HERE}/test_index.py", "test_s1_every_flipped_bit_and_cut_is_seen"),
    "S2": (f"{HERE}/test_contents.py", "test_s2_s3_files_of_two_saves_are_not_mixed"),
    "S3": (f"{HERE}/test_contents.py", "test_s2_s3_files_of_two_saves_are_not_mixed"),
    "S4": ("tests/fault/test_fallback.py", "test_c05_a_manifest_that_is_gone_is_missed"),
    "P1": (f"{HERE}/test_pickled.py", "test_hostile_bytes_cost_nothing_and_end_in_a_typed_error"),
    "P2": (f"{HERE}/test_pickled.py", "test_a_global_outside_the_allow_list_is_named_and_nothing_runs"),
    "P3": (f"{HERE}/test_pickled.py", "test_hostile_bytes_cost_nothing_and_end_in_a_typed_error"),
    "P4": (f"{HERE}/test_reader.py", "test_f04_nothing_of_a_byte_leaf_is_executed_even_by_torchs_planner"),
    "C1": (f"{HERE}/test_catalog.py", "test_a_broken_rule_is_refused_and_the_file_named"),
    "C2": (f"{HERE}/test_catalog.py", "test_a_broken_rule_is_refused_and_the_file_named"),
    "C3": (f"{HERE}/test_reader.py", "test_a_region_that_no_file_holds_is_refused"),
    "C4": (f"{HERE}/test_catalog.py", "test_c4_a_list_that_is_referred_to_again_and_again_is_refused"),
    "C5": (f"{HERE}/test_catalog.py", "test_c5_names_that_lead_out_are_refused"),
    "C6": (f"{HERE}/test_catalog.py", "test_a_broken_rule_is_refused_and_the_file_named"),
    "C7": (f"{HERE}/test_contents.py", "test_c7_a_chunk_without_a_record_is_incomplete"),
    "C8": (f"{HERE}/test_reader.py", "test_c10_damaged_files_are_named_before_anything_changes"),
    "I1": (f"{HERE}/test_index.py", "test_a_broken_rule_is_refused_and_the_file_named"),
    "I2": (f"{HERE}/test_index.py", "test_a_broken_rule_is_refused_and_the_file_named"),
    "I3": (f"{HERE}/test_index.py", "test_a_broken_rule_is_refused_and_the_file_named"),
    "I4": (f"{HERE}/test_index.py", "test_checksums_that_are_no_base64_are_seen_when_they_are_used"),
    "I5": (f"{HERE}/test_index.py", "test_i5_index_and_metadata_must_agree"),
    "I6": (f"{HERE}/test_reader.py", "test_x01_c10_a_flipped_bit_in_a_tensor_is_named"),
    "R1": (f"{HERE}/test_record.py", "test_a_record_of_more_than_four_gib_has_wide_sizes"),
    "R2": (f"{HERE}/test_record.py", "test_no_flipped_bit_moves_the_tensor"),
    "R3": (f"{HERE}/test_record.py", "test_what_is_no_plain_tensor_is_unusual"),
    "R4": (f"{HERE}/test_reader.py", "test_r4_transforms_that_cant_be_undone_are_corrupt"),
    "R5": (f"{HERE}/test_damage.py", "test_a_record_that_says_it_is_compressed_and_is_not"),
    "R6": ("tests/unit/tools/test_frame_check.py", "test_no_flipped_bit_that_torch_stumbles_over_is_missed"),
}


def test_every_rule_has_its_test():
    rules = re.findall(r"^- \*\*([A-Z]\d)\*\* ", (ROOT / "docs" / "format.md").read_text(), re.MULTILINE)
    assert sorted(rules) == sorted(TESTS)


@pytest.mark.parametrize("rule", TESTS)
def test_the_test_is_there(rule):
    file, name = TESTS[rule]
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
