"""What images need of a GPU beside text: attention that looks ahead."""
