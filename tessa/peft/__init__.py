"""TESSA as a PEFT method: importing this package registers it, after which PEFT's own calls work on it.

import tessa.peft
model = peft.get_peft_model(base, tessa.peft.TessaConfig(rank_equivalent=16, task_type="CAUSAL_LM"))
"""

from __future__ import annotations

from tessa.peft.registration import register_peft_type

register_peft_type()

from tessa.peft.config import TessaConfig  # noqa: E402  (needs the enum member that registration adds)
from tessa.peft.layer import TessaLayer  # noqa: E402
from tessa.peft.model import TessaModel, choose_slices, gradient_energy  # noqa: E402
from tessa.peft.registration import register_method  # noqa: E402

register_method(TessaConfig, TessaModel)

__all__ = ["TessaConfig", "TessaLayer", "TessaModel", "choose_slices", "gradient_energy"]
