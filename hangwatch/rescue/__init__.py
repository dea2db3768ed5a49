"""Evidence of a hang from a machine where nothing may be installed: ``hangwatch-rescue.py``.

One file of the standard library, for Python 3.10 and later, that is piped into an interpreter
beside the engine and prints one JSON document (``hangwatch.rescue/1``)::

    kubectl exec -i POD -c engine -- python3 - --pid N < hangwatch-rescue.py > d.json

``hangwatch diagnose d.json`` explains it anywhere (``core.rescue`` unpacks it).

``program`` is what runs there, with ``kernel`` (what ``/proc`` says), ``aside`` (work that may
block, in a child with a deadline), ``reading`` (one process, once) and ``hangwatch.remote``;
``single_file`` makes the one file out of them. Nothing here imports anything else.
"""
