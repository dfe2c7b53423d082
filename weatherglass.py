"""Command line."""


def main(): ...
