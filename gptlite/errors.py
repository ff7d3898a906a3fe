"""Errors that are told to the user in a sentence."""


class UserError(ValueError):
    """Something the user asked for cannot be done. The message is a full sentence for the user."""


def require(holds: bool, sentence: str) -> None:
    """Raise `UserError(sentence)` unless `holds`."""
    if not holds:
        raise UserError(sentence)
