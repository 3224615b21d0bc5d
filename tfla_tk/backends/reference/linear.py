"""The reference as a backend of the operators in [B, T, H, D]: any device and floating dtype, any shape."""

from tfla_tk.core.checks import fail, shown_name
from tfla_tk.core.layout import FORMS
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.ops import delta_rule as delta_rule_ops
from tfla_tk.ops import gla as gla_ops
from tfla_tk.ops import kda as kda_ops
from tfla_tk.ops import simple_gla as simple_gla_ops

simple_gla = simple_gla_ops.ops.serve_by_reference
delta_rule = delta_rule_ops.ops.serve_by_reference
gla = gla_ops.ops.serve_by_reference
kda = kda_ops.ops.serve_by_reference


def supports_form(call: object, variant: str | None = None) -> Support:
    """Everything is supported; ValueError for a variant that is no form."""
    if variant is not None and variant not in FORMS:
        known = [f"reference:{name}" for name in FORMS]
        fail("backend", " or ".join(map(repr, known)), shown_name(f"reference:{variant}", known))
    return SUPPORTED


supports_simple_gla = supports_delta_rule = supports_gla = supports_kda = supports_form
