#include "mx.h"

#include <algorithm>
#include <cmath>

namespace ascend_sim {
namespace {

constexpr double kE4m3Largest = 448.0;
constexpr int kE4m3TopExponent = 8;
constexpr double kSmallestPeak = 1e-4;

double ScaleOf(double peak, int64_t scale_rule) {
  if (scale_rule == 0) return std::ldexp(1.0, std::max(peak == 0 ? -127 : std::ilogb(peak) - kE4m3TopExponent, -127));
  // In float32, as a device would compute it.
  const float ratio = static_cast<float>(std::max(peak, kSmallestPeak)) * static_cast<float>(1.0 / kE4m3Largest);
  int exponent = 0;
  const float mantissa = std::frexp(ratio, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0, mantissa == 0.5f ? exponent - 1 : exponent);
}

}  // namespace

Dims MxScaleDims(const Dims& dims) {
  Dims scales = dims;
  scales.back() = (dims.back() + 2 * kMxGroup - 1) / (2 * kMxGroup);
  scales.push_back(2);
  return scales;
}

Values ApplyMxScales(Values values, const Values& scales, const Dims& dims) {
  const int64_t width = dims.back(), per_row = MxScaleDims(dims)[dims.size() - 1] * 2;
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / width, column = static_cast<int64_t>(i) % width;
    values[i] *= scales[row * per_row + column / kMxGroup];
  }
  return values;
}

MxRows QuantiseE4m3(const Values& values, int64_t width, int64_t scale_rule) {
  const int64_t rows = width == 0 ? 0 : static_cast<int64_t>(values.size()) / width;
  const int64_t per_row = (width + 2 * kMxGroup - 1) / (2 * kMxGroup) * 2;
  MxRows result{Values(values.size()), Values(rows * per_row, 1.0)};
  for (int64_t start = 0; start < rows * width; start += std::min(kMxGroup, width - start % width)) {
    const int64_t end = start + std::min(kMxGroup, width - start % width);
    double peak = 0;
    for (int64_t i = start; i < end; ++i) peak = std::max(peak, std::fabs(values[i]));
    const double scale = ScaleOf(peak, scale_rule);
    result.scales[start / width * per_row + start % width / kMxGroup] = scale;
    for (int64_t i = start; i < end; ++i) {
      const double clipped = std::clamp(values[i] / scale, -kE4m3Largest, kE4m3Largest);
      result.codes[i] = RoundTo(DataType::kFloat8E4m3, clipped);
    }
  }
  return result;
}

}  // namespace ascend_sim
