"""The SGLang plugin: carries out edits on cached KV. Start reading at `plugin.py`, then `noted_request.py`."""
