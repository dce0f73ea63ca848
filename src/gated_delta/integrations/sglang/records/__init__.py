"""Records in SGLang: rows of a KVBuffer for drafts and for decode's ring."""
