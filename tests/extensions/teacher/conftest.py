from tests.pipeline.conftest import make_site, make_yard, quick_looks, tiny_model, yard

__all__ = ["make_site", "make_yard", "quick_looks", "tiny_model", "yard"]
