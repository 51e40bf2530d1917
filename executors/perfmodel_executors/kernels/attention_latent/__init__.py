"""Multi-head latent attention (MLA) over pages of latents."""
