"""One row as it will be learned from: what is scored stands out, special tokens are there to be seen, and the counts say the rest."""

from __future__ import annotations

from itertools import groupby, islice
from typing import Any

from rich.console import Console
from rich.text import Text

from draftsmith.distill.batch import Example
from draftsmith.train.data.chats import Form, chats_of, made

STYLES = {(False, False): "dim", (False, True): "dim reverse", (True, False): "bold green", (True, True): "bold green reverse"}
OPEN, CLOSE = "[[", "]]"  # around what is scored, where there are no colours


def show_rows(records: list[dict[str, Any]], tokenizer: Any, form: Form, most: int) -> None:
    """Print the first `most` rows that `to_rows` would make of these answers or chats."""
    for row in islice((row for chat in chats_of(records) for row in made(chat, tokenizer, form).rows), most):
        show_row(row, tokenizer, Console(highlight=False))


def show_row(row: Example, tokenizer: Any, console: Console) -> None:
    """Print a row, scored text in bold green and the rest dim; into a pipe, scored text between [[ and ]]."""
    last = row.ids[row.spans[-1][1] - 1] if row.spans else None
    how = f"it ends with {tokenizer.convert_ids_to_tokens(last)!r}" if last is not None else "nothing is learned from it"
    counts = f"{len(row.ids)} tokens, {row.scored} of them scored in {len(row.spans)} span{'s' * (len(row.spans) != 1)}; {how}"
    if console.is_terminal and not console.no_color:
        page = Text(end="\n")
        for text, scored, special in pieces(row, tokenizer):
            page.append(text, STYLES[scored, special])
        legend = Text.assemble(
            ("scored", STYLES[True, False]), "  ", ("not scored", STYLES[False, False]), "  ", ("<special>", "reverse")
        )
    else:
        page, inside = Text(end="\n"), False
        for text, scored, _ in pieces(row, tokenizer):
            page.append((OPEN if scored else CLOSE) * (scored != inside) + text)
            inside = scored
        page.append(CLOSE * inside)
        legend = Text(f"scored text stands between {OPEN} and {CLOSE}")
    for one in (page, legend, Text(counts)):
        console.print(one, soft_wrap=True, highlight=False)


def pieces(row: Example, tokenizer: Any) -> list[tuple[str, bool, bool]]:
    """(text, scored, special) of each run of tokens; together the texts are the row's, control characters spelled out."""
    scored = [any(start <= at < end for start, end in row.spans) for at in range(len(row.ids))]
    special = set(tokenizer.all_special_ids) | {at for at, one in tokenizer.added_tokens_decoder.items() if one.special}
    found, end, before = [], 0, ""
    for (learned, marked), run in groupby(zip(scored, (one in special for one in row.ids), strict=True)):
        end += len(list(run))
        # A run's text is what it adds to the text before it: alone, some tokenizers drop its first space.
        whole = tokenizer.decode(row.ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        found.append((_visible(whole[len(before) :]), learned, marked))
        before = whole
    return found


def _visible(text: str) -> str:
    return "".join(one if one.isprintable() or one in "\n\t" else f"\\x{ord(one):02x}" for one in text)
