"""The kinds of draft that can be trained, by their names in ``--config.draft.kind``.

A kind has two classes. Its *settings*, a subclass of :class:`train.config.DraftSettings`, are the
fields of the section ``draft`` of a configuration. Its *trainer* is what the pipeline drives:
``begin`` makes or loads the draft for a target, ``objectives`` gives what a stage learns, ``dtype``
is what the draft is saved in, and ``save`` writes it. Nothing else in ``train/`` knows a kind by
name. A new kind is a folder here, and an entry in both tables. Each of its parameters needs one
rule of :data:`longspec_jax.sharding.RULES`.
"""

from ..config import DraftSettings
from .longspec.settings import LongSpecSettings

SETTINGS: dict[str, type[DraftSettings]] = {"longspec": LongSpecSettings}


def trainer_class(settings: DraftSettings):  # noqa: ANN201 - a union of classes once there are two
    """The trainer of a configuration's kind; only training itself imports it, and jax with it."""
    from .longspec.objective import LongSpecTrainer

    return {"longspec": LongSpecTrainer}[settings.kind]
