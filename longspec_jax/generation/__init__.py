"""Calls of the Python interface, from text to text.

``inputs`` (with ``chat``, ``template`` and ``options``) reads and checks a batch of prompts.
``call`` plans it: drafters (``models``), sizes and memory (``memory``). ``run`` runs the plan on an
engine, with the candidates that ``speeds`` knows and the programs that ``warm`` has compiled.
``text`` and ``result`` make the result. ``comparison`` and ``inspection`` look at a run more
closely, and ``requests`` serves requests that come and go.
"""
