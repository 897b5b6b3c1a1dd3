"""Tool calls: the forms in which models write them, the grammars that hold them, and their parser."""

from spd.cli.serve.call_check import UNKNOWN_FORM, form_of
from spd.cli.serve.call_forms import FORMS, GUESSED, MARKS, QUOTE, Form, Pairs, call_form
from spd.cli.serve.call_grammar import Tools
from spd.cli.serve.call_parser import CallParser, Piece
from spd.cli.serve.schema_arguments import Arguments, as_json

__all__ = ["FORMS", "MARKS", "QUOTE", "Arguments", "CallParser", "Form", "Pairs", "Piece", "Tools"]
__all__ += ["GUESSED", "UNKNOWN_FORM", "as_json", "call_form", "form_of"]
