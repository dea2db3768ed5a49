"""A module whose import never ends: it waits for a thread that imports it, too."""

import importlib
import threading


def load_plugins() -> None:
    """Import everything that may be a plug-in, this module among it."""
    importlib.import_module(__name__)  # waits until the import below is done


loader = threading.Thread(target=load_plugins, name="plugin-loader", daemon=True)
loader.start()
loader.join()
