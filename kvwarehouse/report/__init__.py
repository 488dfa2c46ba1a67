"""What a command found, as tables and plots: data, a page of HTML, SVG."""
