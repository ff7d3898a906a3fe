__version__: str

from .cli import (
    SampleArguments as SampleArguments,
    TrainArguments as TrainArguments,
    parse_sample as parse_sample,
    parse_train as parse_train,
    read_prompt as read_prompt,
    run_script as run_script,
)
from .config import (
    Config as Config,
    DataConfig as DataConfig,
    MeshConfig as MeshConfig,
    ModelConfig as ModelConfig,
    OptimizerConfig as OptimizerConfig,
    SamplingConfig as SamplingConfig,
    TrainingConfig as TrainingConfig,
)
from .custom import load_custom as load_custom
from .errors import UserError as UserError
from .family.beam_search import beam_search as beam_search
from .family.encoder import Encoder as Encoder
from .family.seq2seq import Seq2Seq as Seq2Seq
from .family.train import train as train
from .generation.generate import generate as generate, stream as stream
from .generation.text import prompt_ids as prompt_ids, stream_texts as stream_texts
from .hugging_face.folder import export_run as export_run
from .inspect.attention_maps import attention_maps as attention_maps
from .inspect.logit_lens import logit_lens as logit_lens
from .inspect.summary import summary as summary
from .machine.mesh import make_mesh as make_mesh
from .machine.printed import printable as printable
from .machine.progress import log as log
from .machine.runtime import set_up_jax as set_up_jax
from .models.gpt import GPT as GPT
from .presets import PRESETS as PRESETS
from .research.check_block import CheckError as CheckError, check_block as check_block
from .runs.corpora import load_corpus as load_corpus
from .runs.frozen import trainable as trainable
from .runs.load import load as load
from .runs.model import abstract_model as abstract_model, make_model as make_model
from .runs.run import Run as Run
from .runs.save import save_run as save_run
from .runs.start import start_run as start_run
from .runs.tokenizers import make_tokenizer as make_tokenizer
from .text.batches import Batches as Batches
from .text.corpus import documents as documents, text_corpus as text_corpus
from .text.tokens import split_corpus as split_corpus
from .training.evaluate import Evaluation as Evaluation
from .training.fit import DivergenceError as DivergenceError, fit as fit
from .training.loss import cross_entropy as cross_entropy, window_losses as window_losses
from .training.step import TrainSteps as TrainSteps
