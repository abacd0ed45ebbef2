"""Tests of specjax: the layout mirrors the package."""
