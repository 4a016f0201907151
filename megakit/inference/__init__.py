"""What a trained model is used for: text, and the likelihood of texts. One process, one device."""
