"""What a command sets in its environment, and starts, before the library is imported."""

import contextlib
import os
import threading


def prepare_environment(cache: str | None) -> None:
    """Keep transformers quiet, and say where programs are kept.

    Args:
      cache: a folder or ``off``; what the environment says if absent.
    """
    # It warns of texts beyond a tokenizer's range, for one, which is for us to refuse.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Nor that models need PyTorch, which is untrue of ours. Set here, before there are threads: no
    # variable may change while a GPU's start reads others.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if cache is not None:
        os.environ["LONGSPEC_CACHE"] = cache


def start_devices() -> threading.Thread:
    """Have jax start its devices, which takes a GPU a second, while other things are imported.

    Whoever asks jax for them next waits for this start, or learns why there was none.

    Returns:
      The thread, alive for as long as that takes.
    """
    import jax

    def start() -> None:
        with contextlib.suppress(Exception):  # Raised again where the devices are asked for.
            jax.devices()

    thread = threading.Thread(target=start, name="devices", daemon=True)
    thread.start()
    return thread
