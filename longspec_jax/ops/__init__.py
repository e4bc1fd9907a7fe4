"""Arithmetic on arrays: attention, matmuls, small ops of a layer; knows no models and no caches.

An op begins in the file that defines it; its kernels have files next to that, and are listed after
the definition (:mod:`longspec_jax.ops.dispatch`):

- attention: ``attention/dispatch``, by name ``reference``, ``attention_xla`` and ``kernels``;
- matmuls: ``matmul/few_rows`` (where the definition is), ``ordered``, ``quantised``,
  ``outputs_first``, ``experts``, ``chunked_mlp``;
- norms, heads and rotary, appending to caches: ``layer``; a table's rows: ``embedding``;
- recurrent layers: ``recurrence/recurrence``;
- choices: ``selection/blocks`` of a cache, ``selection/continuations`` of a draft.

``..._pallas`` are kernels for Triton, ``..._mosaic`` for Hopper GPUs, ``..._ampere`` for all from
8.0 on; ``..._programs`` are bodies of such kernels, ``..._tiles`` how work is cut into programs.
"""
