"""The functions of torch.nn.functional as symbols."""

from forge.torchlang.nn.activation import *  # noqa: F403
from forge.torchlang.nn.attention import *  # noqa: F403
from forge.torchlang.nn.conv import *  # noqa: F403
from forge.torchlang.nn.ctc import *  # noqa: F403
from forge.torchlang.nn.decoding_attention import *  # noqa: F403
from forge.torchlang.nn.embedding import *  # noqa: F403
from forge.torchlang.nn.fused_linear_cross_entropy import *  # noqa: F403
from forge.torchlang.nn.kernels import *  # noqa: F403
from forge.torchlang.nn.loss import *  # noqa: F403
from forge.torchlang.nn.margins import *  # noqa: F403
from forge.torchlang.nn.multi_head import *  # noqa: F403
from forge.torchlang.nn.native_norms import *  # noqa: F403
from forge.torchlang.nn.norm import *  # noqa: F403
from forge.torchlang.nn.pooling import *  # noqa: F403
from forge.torchlang.nn.quantized import *  # noqa: F403
from forge.torchlang.nn.recurrent import *  # noqa: F403
from forge.torchlang.nn.resample import *  # noqa: F403
from forge.torchlang.nn.row_product import *  # noqa: F403
from forge.torchlang.nn.softmax import *  # noqa: F403
from forge.torchlang.nn.window_attention import *  # noqa: F403
