"""Documents from a list, as those of a dataset."""

import hashlib
from collections.abc import Sequence

from gptlite.errors import require
from gptlite.text.documents import Documents


def documents(texts: Sequence[str], name: str = "documents") -> Documents:
    """Texts in memory as a corpus of documents, for `make_tokenizer` and `split_corpus`: encoded
    one by one, with the end of a text after each, and every tenth for validation.

    **Raises:** `UserError` if there are none, or a document is no string.
    """
    import datasets

    require(
        len(texts) > 0 and all(isinstance(text, str) for text in texts),
        f"documents takes a list of strings, at least one, got {str(texts)[:100]}.",
    )
    checksum = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        checksum.update(len(content).to_bytes(8, "little") + content)
    rows = datasets.Dataset.from_dict({"text": list(texts)}).to_iterable_dataset()
    # The ids of another list are another file.
    name, fingerprint = f"{name} {checksum.hexdigest()[:16]}", checksum.hexdigest()
    return Documents(name, fingerprint, rows, "text", is_text=False)
