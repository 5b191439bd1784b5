"""The capacity task: how many associations a memory holds (`attnlab capacity`). Importing this imports no torch."""
