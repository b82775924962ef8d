"""Language models, classifiers of texts and words, tokenizers, and networks of Transformers."""
