from .config import (
    Config as Config,
    ModelConfig as ModelConfig,
    OptimizerConfig as OptimizerConfig,
    SamplingConfig as SamplingConfig,
    TrainingConfig as TrainingConfig,
    UserError as UserError,
)
from .custom import load_custom as load_custom
from .family.beam_search import beam_search as beam_search
from .family.encoder import Encoder as Encoder
from .family.seq2seq import Seq2Seq as Seq2Seq
from .generation.generate import generate as generate
from .hugging_face.folder import load_hf as load_hf
from .inspect.attention_maps import attention_maps as attention_maps
from .inspect.logit_lens import logit_lens as logit_lens
from .inspect.summary import summary as summary
from .models.gpt import GPT as GPT
from .research.check_block import check_block as check_block
from .runs.load import load_run as load_run
from .runs.tokenizers import make_tokenizer as make_tokenizer
from .sharding import make_mesh as make_mesh
from .text.batches import Batches as Batches
from .text.corpus import load_corpus as load_corpus
from .text.tokens import split_corpus as split_corpus
from .training.evaluate import Evaluation as Evaluation
from .training.fit import fit as fit
from .training.step import TrainSteps as TrainSteps
from .training.train import train as train
