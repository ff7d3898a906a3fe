"""What a terminal may be shown."""

import re

# Control characters; separators of lines and paragraphs; characters that change the direction of
# the text after them; halves of a pair, which cannot be printed.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with escapes such as `\\x1b` in place of characters that a terminal would obey. Text
    from a model, a run folder or a file may have any."""

    def escaped(match: re.Match[str]) -> str:
        character = match[0]
        if character in "\t\n":
            return character
        return character.encode("unicode_escape").decode("ascii")

    return CONTROL.sub(escaped, text)
