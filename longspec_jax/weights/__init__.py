"""Hugging Face checkpoints in and out.

:mod:`hf` loads and saves; :mod:`hf_config` and :mod:`hf_rope` translate ``config.json``, whose
values :mod:`raw` checks; :mod:`tables` says which stored tensor is which block of which parameter;
:mod:`match` is strict about it. :mod:`hub`, :mod:`checkpoint` and :mod:`torch_files` find and open
files as :mod:`tensors`, :mod:`stream` fills sharded arrays from their slices, and :mod:`export`
writes them back.
"""
