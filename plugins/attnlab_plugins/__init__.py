"""The variants that come with attnlab. They use attnlab's public names only; a stranger's plugin can do all they do."""
