"""Hugging Face checkpoints in and out.

:mod:`.hf` loads and saves targets. :mod:`.hf_config` translates ``config.json``, whose values
:mod:`.json_files` checks. :mod:`.tables` says which stored tensor is which block of which
parameter. :mod:`.hub` finds folders, :mod:`.checkpoint` opens their weight files, and
:mod:`.params` fills sharded arrays from them and writes them back. The formats of drafts lie next
to the drafts, such as :mod:`longspec_jax.drafters.checkpoints.longspec`.
"""
