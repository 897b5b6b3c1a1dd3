"""Every operation has a test that a row's result is its own, whoever else is computed with it."""

from __future__ import annotations

import ast
from pathlib import Path

from spd.kernels.dispatch import operation_stems

PLACE = "test_a_rows_bits_do_not_depend_on_its_place_and_neighbours"
ROW = "test_a_row_alone_is_the_row_among_others"
SAME = "test_a_row_is_the_same_alone_and_among_others"
SLOT = "test_a_slot_does_not_see_its_neighbours"
SLOT_ALONE = "test_a_slot_is_the_same_alone_and_among_others"
RECURRENT = "test_passes_of_the_triton_form_are_single_steps"

SHOWN_BY = {
    "embed": ("skinny_linear", "test_a_row_is_embedded_alone_as_among_others"),
    "norm_linear": ("skinny_linear", PLACE),
    "norm_gate_up": ("skinny_linear", PLACE),
    "linear": ("skinny_linear", PLACE),
    "linear_residual": ("skinny_linear", PLACE),
    "rms_norm_rows": ("skinny_linear", PLACE),
    "norm_residual": ("norm_residual", ROW),
    "head_logits": ("skinny_linear", PLACE),
    "head_sample": ("skinny_linear", PLACE),
    "rotary_store": ("rotary_store", ROW),
    "plan_attention": ("paged_attention", ROW),
    "paged_attention": ("paged_attention", ROW),
    "prefill_attention": ("prefill_attention", ROW),
    "latent_store": ("mla_triton", "test_what_is_kept_of_a_row"),
    "head_linear": ("mla_triton", "test_each_head_has_its_own_product"),
    "mla_attention": ("mla_triton", ROW),
    "mla_prefill": ("mla_triton", "test_prompt_chunks"),
    "router_logits": ("moe_triton", "test_routing"),
    "route": ("moe_triton", "test_routing"),
    "experts": ("moe_triton", "test_experts"),
    "experts_onto": ("moe_triton", "test_experts"),
    "short_conv": ("recurrent", RECURRENT),
    "delta_rule": ("recurrent", RECURRENT),
    "gated_norm": ("recurrent", RECURRENT),
    "sample_rows": ("sampling", SAME),
    "row_laws": ("row_laws", SAME),
    "rejection_verify": ("draft_verify_triton", SLOT_ALONE),
    "block_verify": ("draft_verify_triton", SLOT_ALONE),
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
