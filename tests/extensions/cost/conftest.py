from tests.pipeline.conftest import make_site, quick_looks, tiny_model

__all__ = ["make_site", "quick_looks", "tiny_model"]
