"""4-bit schemes: quantize beside dequantize, one module a scheme. numpy only."""
