"""Kernel repositories of the Hugging Face Hub: variants, manifests, resolution, build and verification."""
