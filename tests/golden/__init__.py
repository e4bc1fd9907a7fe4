"""What this version computes, recorded before a change and compared after it.

    python -m tests.golden record FOLDER
    python -m tests.golden compare FOLDER [--only tokens|digests|training] [--names GLOB]

Both on one machine: another processor adds floats up in another order. The folder keeps the models,
so that a change of the tests' toys does not change them.
"""
