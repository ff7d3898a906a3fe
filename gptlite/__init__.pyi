from .config import (
    Config as Config,
    ModelConfig as ModelConfig,
    OptimizerConfig as OptimizerConfig,
    SamplingConfig as SamplingConfig,
    TrainingConfig as TrainingConfig,
    UserError as UserError,
)
from .custom import load_custom as load_custom
from .generation.beam_search import beam_search as beam_search
from .generation.generate import generate as generate
from .models.attention_maps import attention_maps as attention_maps
from .models.encoder import Encoder as Encoder
from .models.gpt import GPT as GPT
from .models.logit_lens import logit_lens as logit_lens
from .models.seq2seq import Seq2Seq as Seq2Seq
from .models.summary import summary as summary
from .research.check_block import check_block as check_block
from .runs.hugging_face import load_hf as load_hf
from .runs.load import load_run as load_run
from .sharding import make_mesh as make_mesh
from .text.batches import Batches as Batches
from .text.corpus import load_corpus as load_corpus
from .text.tokenizer import make_tokenizer as make_tokenizer
from .text.tokens import split_corpus as split_corpus
from .training.evaluate import Evaluation as Evaluation
from .training.fit import fit as fit
from .training.step import TrainSteps as TrainSteps
from .training.train import train as train
