"""Figures (frame in, Plotly figure out) and the Dash application."""
