"""Makes PEFT know the type ``TESSA``.

`peft.utils.register_peft_method` takes a config and a model class, but looks the name up in the enum
`PeftType`, which is closed; so a member is added to the enum first. Both steps do nothing when repeated.
"""

from __future__ import annotations

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import register_peft_method
from peft.utils.peft_types import PeftType

NAME = "TESSA"


def register_peft_type() -> PeftType:
    """Add ``PeftType.TESSA``, which then behaves as PEFT's own members, also for json and pickle."""
    if NAME in PeftType.__members__:
        return PeftType[NAME]
    member = str.__new__(PeftType, NAME)
    member._name_ = NAME
    member._value_ = NAME
    PeftType._member_names_.append(NAME)
    PeftType._member_map_[NAME] = member
    PeftType._value2member_map_[NAME] = member
    hashable = getattr(PeftType, "_hashable_values_", None)
    if hashable is not None:  # Python 3.13 looks values up here as well
        hashable.append(NAME)
    # The enum's metaclass refuses to set members; plain class attributes are what Python 3.12 and later read.
    type.__setattr__(PeftType, NAME, member)
    return member


def register_method(config_cls: type, model_cls: type) -> None:
    """Register the classes for ``PeftType.TESSA`` unless some are registered already."""
    if PeftType[NAME] not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name=NAME.lower(), config_cls=config_cls, model_cls=model_cls)
