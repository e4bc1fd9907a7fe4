"""Reading a part of a cache: which slots, how often they are chosen, and who reads them.

:mod:`.selection` is what can be read, and what chooses it. A draft may read such a part
(:mod:`.working_cache`), and the target may verify over one before it verifies over all
(:mod:`.hierarchy`, with the options named ``retrieve``).
"""
