"""Calls of the Python interface, from text to text.

``inputs`` turns text, chat messages (``chat``, ``template``) and token ids into prompts, and
``options`` resolves the generation options of every row. ``call`` holds a checked call with its
sizes, ``memory`` checks that it fits, and ``run`` runs it on an engine. ``autotune`` chooses the
tree, and ``timings`` keeps what was measured. ``collect``, ``text`` and ``result`` make the result;
``comparison``, ``inspection`` and ``breakdown`` look at a run more closely.
"""
