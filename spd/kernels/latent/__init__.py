"""Latent attention (MLA) over paged latents."""
