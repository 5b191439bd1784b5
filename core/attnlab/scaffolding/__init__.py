"""What `attnlab new` writes: templates of variants and packages, and the code that fills them in. Needs no torch.

naming: which names a new variant may have. filling: templates to texts. rows: a row into a registry file that
is there already. writing: the files, all or none. The templates are data files in `templates`.
"""
