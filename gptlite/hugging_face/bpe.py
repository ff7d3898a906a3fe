"""A byte-level byte-pair encoding, trained on a text (Sennrich et al., 2016; on bytes: Radford et
al., 2019, section 2.2).

The library `tokenizers` learns the merges. tiktoken encodes with the tokens that they make, several
times as fast (benchmarks/vocabulary.py).
"""

from collections.abc import Iterator

import tiktoken
import tokenizers

from gptlite.hugging_face.components import SPLITS
from gptlite.hugging_face.tokenizer import BYTE_CHARACTERS, byte_level
from gptlite.machine.names import BPE_SIZES
from gptlite.machine.progress import log, progress_bar
from gptlite.text.corpus import Corpus
from gptlite.text.tokenizer import END_OF_TEXT, PATTERNS, TiktokenTokenizer

# The split of GPT-4's encoding.
PATTERN = PATTERNS[1]
# Characters that merges are learnt from, at most: 10 s of work.
SAMPLE = 2**26
# Characters that the library is given at once: it needs 170 bytes for each, for 256 pieces.
PIECE = 2**14


def train_bpe(corpus: Corpus, size: int, *, sample: int = SAMPLE) -> TiktokenTokenizer:
    """An encoding with `size` tokens: the bytes, merges of the training part of `corpus`, and, if
    there is room for more than the bytes, `<|endoftext|>`. The same text gives the same encoding.

    A text of more than `sample` characters is read in evenly distributed pieces of that size in
    all; of a dataset, the first documents are. A text with too few different words gives fewer
    tokens. This is logged.
    """
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLITS[PATTERN]), "isolated"),
            byte_level(),
        ]
    )
    specials = {END_OF_TEXT: size - 1} if size > BPE_SIZES[0] else {}
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size - len(specials),
        initial_alphabet=sorted(BYTE_CHARACTERS.values()),
        show_progress=False,
    )
    model.train_from_iterator(_sampled(corpus, sample), trainer)
    bytes_of = {character: byte for byte, character in BYTE_CHARACTERS.items()}
    # Sorted: `get_vocab` has another order each time.
    ranks = {
        bytes(bytes_of[character] for character in token): rank
        for token, rank in sorted(model.get_vocab().items(), key=lambda item: item[1])
    }
    if len(ranks) + len(specials) < size:
        size = len(ranks) + len(specials)
        log(f"The text has too few different words for more than {size:,} tokens.")
        specials = dict.fromkeys(specials, size - 1)
    return TiktokenTokenizer(
        tiktoken.Encoding(
            f"bpe:{size}", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
    )


def _sampled(corpus: Corpus, sample: int) -> Iterator[str]:
    """Pieces of what is for training."""
    characters = corpus.characters
    total = None if characters is None else int(0.9 * characters)
    if total is not None and total > sample:
        log(
            f"The tokenizer is trained on {sample:,} of {total:,} characters, from all of the text."
        )
    place = taken = 0
    bar = progress_bar("training the tokenizer", total or sample, unit=" characters", delay=2.0)
    with bar:
        for piece in (x for is_held_out, part in corpus.parts() if not is_held_out for x in part):
            for start in range(0, len(piece), PIECE):
                part = piece[start : start + PIECE]
                # So much of what has been read is to be taken; of a dataset, everything.
                if total is None or taken * total <= place * sample or total <= sample:
                    taken += len(part)
                    yield part
                place += len(part)
            bar.update(len(piece))
            if total is None and taken >= sample:
                log(f"The tokenizer is trained on the first {taken:,} characters.")
                return
