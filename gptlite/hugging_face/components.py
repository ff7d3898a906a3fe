"""The parts of a `tokenizer.json` that may be used. A stranger's may take any time, fill the memory
or end the process: so each part, and each pattern, is one that is known, and a text grows little.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from gptlite.errors import require
from gptlite.text.tokenizer import PATTERNS

# Steps of each part: those of real tokenizers are fewer than ten, and each reads the whole text.
MAX_STEPS = 64
# How many characters may come of one, by all normalizers or decoders together, without what is put
# before a text.
MAX_GROWTH = 32
# The most that each of them makes of a character (Unicode Standard Annex 15, section 17).
GROWTH = {
    **{"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 3},
    **{"ByteLevel": 4, "Strip": 1, "StripAccents": 1, "Nmt": 1},
}
MODELS = ("BPE", "Unigram", "WordLevel")
PRE_TOKENIZERS = (
    *("ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"),
    *("BertPreTokenizer", "CharDelimiterSplit", "UnicodeScripts"),
)
# Each of these makes a text longer, some at every place where it was split. None has two of a kind.
GROWING = ("ByteLevel", "Metaspace")
DECODERS = ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")
POST_PROCESSORS = ("TemplateProcessing", "ByteLevel", "BertProcessing", "RobertaProcessing")
# Characters of a text that is put before another one.
MAX_PREFIX = 100
# Ids that are put before a text.
MAX_START = 16
# Characters of a token of a Unigram model, which looks for the longest one at each character, and
# of all of them (Gemma's are 2 million).
MAX_PIECE, MAX_PIECES = 128, 2**22
# Tokens (Gemma has 0.3 million), and characters of those that were added to the model's, also after
# the normalizer: the library needs more than a hundred bytes for each.
MAX_TOKENS, MAX_ADDED = 2**20, 2**20

# PATTERNS without possessive quantifiers, which the other library reads differently. They only make
# the search faster.
SPLITS = {
    PATTERNS[0]: r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    PATTERNS[1]: (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s+\z|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    PATTERNS[2]: PATTERNS[2],
}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Those of Llama 3 and of Qwen 2 differ in their numbers; in that of Qwen 3.5, marks join letters.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# That of Mistral's Tekken.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Each splits before a space between letters, and between a line's end and a letter.
KNOWN_SPLITS = {
    *SPLITS.values(),
    *(_GPT2, _LLAMA3, _LLAMA3.replace("{1,3}", ""), _QWEN35, _TEKKEN),
}
# One kind of character, once or repeated: takes a time in proportion to the text. (`[` in a class
# would begin another one.)
_SET = r"\\[dDsSwWrnt]|\\p\{\^?\w+\}"
_ONE_KIND = re.compile(rf"(?: \??)?(?:{_SET}|\[(?:[^\[\]\\]|{_SET})+\])(?:\+|\{{1,\d\}})?")


def check_components(record: Any) -> None:
    """**Raises:** `UserError` if a part of the `tokenizer.json` in `record` is not known."""
    require(isinstance(record, dict), "A tokenizer.json is a JSON object.")
    _check_model(record.get("model"))
    for name, steps, kinds in (
        ("normalizer", normalizers(record), (*GROWTH, "Prepend", "Replace")),
        ("decoder", decoders(record), DECODERS),
    ):
        growth = 1
        for step in steps:
            _check(step.get("type") in kinds, name, step.get("type"))
            growth *= 1 if step.get("type") == "Prepend" else _growth(name, step)
        require(
            growth <= MAX_GROWTH,
            f"The tokenizer's {name}s may make {growth:,} characters of one, at most {MAX_GROWTH} "
            "are allowed.",
        )
    growth = normalizer_growth(record)
    added = [
        len(token["content"]) * (growth if token.get("normalized") else 1)
        for token in record.get("added_tokens") or ()
    ]
    _check_size("added tokens' length in characters", sum(added), MAX_ADDED)
    kinds = Counter(str(step.get("type")) for step in pre_tokenizers(record))
    for kind in GROWING:
        _check_size(f"number of pre_tokenizers of the kind {kind}", kinds[kind], 1)
    for step in pre_tokenizers(record):
        pattern = step.get("pattern")
        is_split = step.get("type") == "Split"
        known = is_known_pattern(pattern) if is_split else step.get("type") in PRE_TOKENIZERS
        _check(known, "pre_tokenizer", pattern if is_split else step.get("type"))
        _check_prefix(step.get("replacement", ""))
    for step in _steps(record, "post_processor", "processors"):
        _check(step.get("type") in POST_PROCESSORS, "post_processor", step.get("type"))
        pieces, known = step.get("single") or (), step.get("special_tokens") or {}
        named = [x["SpecialToken"]["id"] for x in pieces if "SpecialToken" in x]
        # At one that is absent, and at a second text, the library would panic.
        texts = [x["Sequence"]["id"] for x in pieces if "Sequence" in x]
        _check(all(name in known for name in named), "post_processor", named)
        _check(texts in ([], ["A"]), "post_processor", texts)
        n_ids = sum(len(known[name]["ids"]) for name in named)
        require(
            n_ids <= 2 * MAX_START,
            f"The tokenizer puts {n_ids:,} ids around a text: at most {2 * MAX_START} are allowed.",
        )


def _check_model(model: Any) -> None:
    kind = model.get("type", "BPE") if isinstance(model, dict) else model
    _check(kind in MODELS, "model", kind)
    # One that a merge lacks makes the library panic; no model that gptlite reads has one.
    prefix = model.get("continuing_subword_prefix")
    _check(not prefix, "model", {"continuing_subword_prefix": prefix})
    for name in ("end_of_word_suffix", "unk_token"):
        _check_prefix(model.get(name) or "")
    _check_size("number of tokens", len(model.get("vocab") or ()), MAX_TOKENS)
    _check_size("number of merges", len(model.get("merges") or ()), MAX_TOKENS)
    lengths = [len(piece) for piece, _ in model.get("vocab") or ()] if kind == "Unigram" else []
    _check_size("longest token's length in characters", max(lengths, default=0), MAX_PIECE)
    _check_size("tokens' length in characters", sum(lengths), MAX_PIECES)


def normalizers(record: Mapping[str, Any]) -> list[Any]:
    """The steps that change a text's characters, in their order."""
    return _steps(record, "normalizer", "normalizers")


def normalizer_growth(record: Mapping[str, Any]) -> int:
    """The most characters that the normalizer makes of one."""
    return math.prod(_growth("normalizer", step) for step in normalizers(record))


def pre_tokenizers(record: Mapping[str, Any]) -> list[Any]:
    """The steps that split a text, in their order."""
    return _steps(record, "pre_tokenizer", "pretokenizers")


def decoders(record: Mapping[str, Any]) -> list[Any]:
    """The steps that make bytes of a token, in their order."""
    return _steps(record, "decoder", "decoders")


def is_known_pattern(pattern: Any) -> bool:
    """Whether a search for the pattern takes little time in every text."""
    if not isinstance(pattern, dict):
        return False
    text, regex = pattern.get("String"), pattern.get("Regex")
    if isinstance(text, str):
        return 0 < len(text) <= MAX_PREFIX
    return isinstance(regex, str) and (
        regex in KNOWN_SPLITS or _ONE_KIND.fullmatch(regex) is not None
    )


def _steps(record: Mapping[str, Any], name: str, inside: str) -> list[dict[str, Any]]:
    """The steps of a part, those of sequences one by one."""
    steps, pending = [], [record.get(name)]
    while pending:
        step = pending.pop(0)
        if step is None:
            continue
        require(isinstance(step, dict), f"The tokenizer's {name} is {str(step)[:100]!r}.")
        more = step.get(inside) if step.get("type") == "Sequence" else []
        require(isinstance(more, list), f"The tokenizer's {name} has a sequence without steps.")
        steps += [] if step.get("type") == "Sequence" else [step]
        n_steps = len(steps) + len(more) + len(pending)
        require(
            n_steps <= MAX_STEPS,
            f"The tokenizer's {name} has {n_steps:,} steps, at most {MAX_STEPS} are allowed.",
        )
        pending = [*more, *pending]
    return steps


def _growth(name: str, step: dict[str, Any]) -> int:
    """The most characters that a normalizer or a decoder makes of one."""
    _check_prefix(step.get("replacement", ""))
    if step.get("type") == "Prepend":
        _check_prefix(step.get("prepend", ""))
        return 1 + len(step.get("prepend", ""))  # of a text of one character
    if step.get("type") != "Replace":
        return GROWTH.get(str(step.get("type")), 1) if name == "normalizer" else 1
    pattern, content = step.get("pattern"), step.get("content")
    # gptlite decodes itself, and has no engine for the library's expressions.
    _check(is_known_pattern(pattern) and isinstance(content, str), name, pattern)
    string = pattern.get("String") if isinstance(pattern, dict) else None
    _check(string is not None or name == "normalizer", name, pattern)
    least = 1 if string is None else len(string)
    return max(1, -(-len(str(content)) // least))


def _check_size(what: str, size: int, most: int) -> None:
    require(size <= most, f"The tokenizer's {what} is {size:,}: at most {most:,} is allowed.")


def _check(known: bool, part: str, what: Any) -> None:
    require(
        known,
        f"The tokenizer's {part} has {str(what)[:200]!r}, which gptlite does not know: what is not "
        "known may take any time or memory.",
    )


def _check_prefix(text: Any) -> None:
    require(
        isinstance(text, str) and len(text) <= MAX_PREFIX,
        f"A text that the tokenizer puts in has at most {MAX_PREFIX} characters, got "
        f"{str(text)[:200]!r}.",
    )
