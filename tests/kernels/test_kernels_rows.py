"""Every operation has a test that a row's result does not depend on the rows beside it."""

from __future__ import annotations

import ast
from pathlib import Path

from spd.kernels.dispatch import operation_stems

PLACE = ("skinny_linear", "test_a_rows_bits_do_not_depend_on_its_place_and_neighbours")
ROW = "test_a_row_alone_is_the_row_among_others"
SAME = ("sampling", "test_a_row_is_the_same_alone_and_among_others")
CHUNK = ("attention", "test_a_row_of_a_prompt_alone_is_the_row_in_its_chunk")
SLOT = "test_a_slot_does_not_see_its_neighbours"
RECURRENT = ("recurrent", "test_passes_of_the_triton_form_are_single_steps")

SHOWN_BY = {
    "embed": ("skinny_linear", "test_a_row_of_a_table_is_the_same_alone_and_among_others"),
    **dict.fromkeys(("linear", "norm_gate_up", "rms_norm_rows"), PLACE),
    **dict.fromkeys(("norm_residual", "head_logits", "head_sample"), PLACE),
    **dict.fromkeys(("rotary_store", "latent_store"), ("rotary_store", ROW)),
    **dict.fromkeys(("plan_attention", "paged_attention", "mla_attention"), ("attention", ROW)),
    **dict.fromkeys(("prefill_attention", "mla_prefill"), CHUNK),
    "head_linear": ("skinny_linear", "test_each_head_has_its_own_product"),
    **dict.fromkeys(("router_logits", "route"), ("moe", "test_routing")),
    **dict.fromkeys(("experts", "experts_onto"), ("moe", "test_experts")),
    **dict.fromkeys(("short_conv", "delta_rule", "gated_norm"), RECURRENT),
    "delta_chunks": ("recurrent", "test_how_many_chunks_a_call_holds_changes_no_bit"),
    "sample_rows": SAME,
    "row_laws": ("row_laws", SAME[1]),
    "verify_drafts": ("draft_verify_triton", "test_a_slot_is_the_same_alone_and_among_others"),
    "round_window": ("round_window", SLOT),
    "round_commit": ("round_commit", SLOT),
    "ngram_lookup": ("ngram_lookup", "test_drafts_equal_a_plain_search"),
    "committed_window": ("draft_window", SLOT),
    "draft_step": ("draft_window", "test_steps_equal_their_definition"),
    "head_input": ("head_input", ROW),
    "keep_states": ("head_input", "test_states_are_kept_where_they_belong"),
}
"""(File, test) of each; those that walk over slots compare whole numbers or copies with a definition."""

WITHOUT_ROWS = {"mark_time"}


def test_every_operation_is_shown_to_keep_rows_apart() -> None:
    assert set(SHOWN_BY) == set(operation_stems()) - WITHOUT_ROWS
    for operation, (stem, name) in SHOWN_BY.items():
        text = (Path(__file__).parent / f"test_kernels_{stem}.py").read_text()
        tests = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        assert name in tests, f"{operation}: no {name} in {stem}"
