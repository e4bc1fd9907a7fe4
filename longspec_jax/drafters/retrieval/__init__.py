"""Reading a part of a cache: which slots, how often they are chosen, and who reads them.

:mod:`.selection` is what can be read, and the choice without any state: the first and the last
tokens. :mod:`.blocks` chooses the best blocks by queries of the target. A draft may read such a
part (:mod:`.working_cache`), and the target may verify over one before it verifies over all
(:mod:`.hierarchy`, and :mod:`.draft` for the options named ``retrieve``).
"""
