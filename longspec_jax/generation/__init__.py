"""Calls of the Python interface, from text to text.

A prompt passes through ``batch`` (``inputs``, ``chat``, ``template``, ``options``), which reads and
checks it, and ``call``, which plans the call: drafters (``models``), sizes and memory (``memory``).
``run`` runs the plan on an engine (``engines``), and ``autotune`` chooses its tree by the
``timings``. ``text`` and ``result`` make the result. ``comparison`` and ``inspection`` look at a
run more closely, and ``requests`` serves requests that come and go.
"""
