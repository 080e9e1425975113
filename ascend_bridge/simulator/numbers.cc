#include "numbers.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace ascend_sim {
namespace {

// What lies above the largest finite value.
enum class Top { kInfinity, kNanOnly, kSaturate };

struct FloatFormat {
  int exponent_bits;
  int mantissa_bits;
  Top top;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint32_t nan() const { return (1u << (exponent_bits + mantissa_bits)) - 1; }
  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  uint32_t largest() const {
    if (top == Top::kSaturate) return nan();
    return top == Top::kNanOnly ? nan() - 1 : infinity() - 1;
  }
};

constexpr FloatFormat kHalf{5, 10, Top::kInfinity};
constexpr FloatFormat kBrain{8, 7, Top::kInfinity};
constexpr FloatFormat kE5m2{5, 2, Top::kInfinity};
constexpr FloatFormat kE4m3{4, 3, Top::kNanOnly};
constexpr FloatFormat kE2m1{2, 1, Top::kSaturate};

double DecodeBits(const FloatFormat& format, uint32_t code) {
  const uint32_t sign_bit = 1u << (format.exponent_bits + format.mantissa_bits);
  const uint32_t magnitude = code & (sign_bit - 1);
  const double sign = (code & sign_bit) ? -1.0 : 1.0;
  if (magnitude > format.largest()) {
    const bool is_infinite = format.top == Top::kInfinity && magnitude == format.infinity();
    return is_infinite ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  const int field = static_cast<int>(magnitude >> format.mantissa_bits);
  const double mantissa = magnitude & ((1u << format.mantissa_bits) - 1);
  const double leading = field == 0 ? 0.0 : std::ldexp(1.0, format.mantissa_bits);
  const int exponent = (field == 0 ? 1 : field) - format.bias() - format.mantissa_bits;
  return sign * std::ldexp(leading + mantissa, exponent);
}

uint32_t EncodeBits(const FloatFormat& format, double value) {
  const uint32_t sign = std::signbit(value) ? 1u << (format.exponent_bits + format.mantissa_bits) : 0u;
  const double size = std::fabs(value);
  if (std::isnan(value)) return format.nan();
  if (size == 0) return sign;
  const int lowest = 1 - format.bias();
  const int exponent = std::isinf(size) ? 1 << 20 : std::max(std::ilogb(size), lowest);
  uint64_t code = uint64_t{1} << 40;
  if (exponent <= format.bias() + 1) {
    // The mantissa with its leading bit; a carry out of it runs into the exponent field, which is what is wanted.
    const double steps = std::nearbyint(std::ldexp(size, format.mantissa_bits - exponent));
    code = static_cast<uint64_t>(steps) + (static_cast<uint64_t>(exponent - lowest) << format.mantissa_bits);
  }
  if (code <= format.largest()) return sign | static_cast<uint32_t>(code);
  if (format.top == Top::kSaturate) return sign | format.largest();
  return sign | (format.top == Top::kInfinity ? format.infinity() : format.nan());
}

const FloatFormat* FloatFormatOf(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16:
      return &kHalf;
    case DataType::kBf16:
      return &kBrain;
    case DataType::kFloat8E5m2:
      return &kE5m2;
    case DataType::kFloat8E4m3:
      return &kE4m3;
    case DataType::kFloat4E2m1:
      return &kE2m1;
    default:
      return nullptr;
  }
}

// The values of all codes.
std::vector<double> TableOf(const FloatFormat& format) {
  std::vector<double> values(size_t{1} << (1 + format.exponent_bits + format.mantissa_bits));
  for (size_t code = 0; code < values.size(); ++code) values[code] = DecodeBits(format, static_cast<uint32_t>(code));
  return values;
}

// The same for a type that has a float format, else nullptr.
const double* ValuesOf(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16: {
      static const std::vector<double> values = TableOf(kHalf);
      return values.data();
    }
    case DataType::kBf16: {
      static const std::vector<double> values = TableOf(kBrain);
      return values.data();
    }
    case DataType::kFloat8E5m2: {
      static const std::vector<double> values = TableOf(kE5m2);
      return values.data();
    }
    case DataType::kFloat8E4m3: {
      static const std::vector<double> values = TableOf(kE4m3);
      return values.data();
    }
    case DataType::kFloat4E2m1: {
      static const std::vector<double> values = TableOf(kE2m1);
      return values.data();
    }
    default:
      return nullptr;
  }
}

template <class T>
double LoadAs(const char* data, int64_t index) {
  T value;
  std::memcpy(&value, data + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return static_cast<double>(value);
}

template <class T>
void StoreAs(char* data, int64_t index, double value) {
  const T stored = static_cast<T>(value);
  std::memcpy(data + index * static_cast<int64_t>(sizeof(T)), &stored, sizeof(T));
}

uint32_t LoadCode(const char* data, int64_t index, int64_t bits) {
  if (bits == 4) return (static_cast<uint8_t>(data[index / 2]) >> (index % 2 * 4)) & 0xF;
  uint32_t code = 0;
  std::memcpy(&code, data + index * bits / 8, bits / 8);
  return code;
}

void StoreCode(char* data, int64_t index, int64_t bits, uint32_t code) {
  if (bits == 4) {
    const int shift = index % 2 * 4;
    const auto old = static_cast<uint8_t>(data[index / 2]);
    data[index / 2] = static_cast<char>((old & ~(0xF << shift)) | (code << shift));
    return;
  }
  std::memcpy(data + index * bits / 8, &code, bits / 8);
}

}  // namespace

int64_t BitsOf(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat4E2m1:
      return 4;
    case DataType::kInt8:
    case DataType::kUint8:
    case DataType::kBool:
    case DataType::kFloat8E5m2:
    case DataType::kFloat8E4m3:
    case DataType::kFloat8E8m0:
      return 8;
    case DataType::kFloat16:
    case DataType::kBf16:
    case DataType::kInt16:
    case DataType::kUint16:
      return 16;
    case DataType::kFloat:
    case DataType::kInt32:
    case DataType::kUint32:
      return 32;
    case DataType::kInt64:
    case DataType::kUint64:
    case DataType::kDouble:
      return 64;
    default:
      return 0;
  }
}

const char* NameOf(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat:
      return "FLOAT";
    case DataType::kFloat16:
      return "FLOAT16";
    case DataType::kBf16:
      return "BF16";
    case DataType::kInt32:
      return "INT32";
    case DataType::kInt64:
      return "INT64";
    case DataType::kUint8:
      return "UINT8";
    case DataType::kFloat8E4m3:
      return "FLOAT8_E4M3FN";
    case DataType::kFloat8E8m0:
      return "FLOAT8_E8M0";
    case DataType::kFloat4E2m1:
      return "FLOAT4_E2M1";
    default:
      return "another type";
  }
}

double Decode(DataType dtype, const char* data, int64_t index) {
  if (const double* values = ValuesOf(dtype)) return values[LoadCode(data, index, BitsOf(dtype))];
  switch (dtype) {
    case DataType::kFloat:
      return LoadAs<float>(data, index);
    case DataType::kDouble:
      return LoadAs<double>(data, index);
    case DataType::kInt32:
      return LoadAs<int32_t>(data, index);
    case DataType::kInt64:
      return LoadAs<int64_t>(data, index);
    case DataType::kFloat8E8m0: {
      const uint32_t code = LoadCode(data, index, 8);
      return code == 255 ? std::nan("") : std::ldexp(1.0, static_cast<int>(code) - 127);
    }
    default:
      return std::nan("");
  }
}

void DecodeRow(DataType dtype, const char* data, int64_t first, std::vector<double>& out) {
  const double* values = ValuesOf(dtype);
  if (values != nullptr && BitsOf(dtype) == 8) {
    for (size_t i = 0; i < out.size(); ++i) out[i] = values[static_cast<uint8_t>(data[first + static_cast<int64_t>(i)])];
  } else if (values != nullptr && BitsOf(dtype) == 16) {
    for (size_t i = 0; i < out.size(); ++i) {
      uint16_t code;
      std::memcpy(&code, data + 2 * (first + static_cast<int64_t>(i)), sizeof code);
      out[i] = values[code];
    }
  } else {
    for (size_t i = 0; i < out.size(); ++i) out[i] = Decode(dtype, data, first + static_cast<int64_t>(i));
  }
}

void Encode(DataType dtype, char* data, int64_t index, double value) {
  if (const FloatFormat* format = FloatFormatOf(dtype)) {
    StoreCode(data, index, BitsOf(dtype), EncodeBits(*format, value));
  } else if (dtype == DataType::kFloat) {
    StoreAs<float>(data, index, value);
  } else if (dtype == DataType::kInt32) {
    StoreAs<int32_t>(data, index, value);
  } else if (dtype == DataType::kFloat8E8m0) {
    StoreCode(data, index, 8, static_cast<uint32_t>(std::ilogb(value) + 127));
  }
}

double RoundTo(DataType dtype, double value) {
  char code[8] = {};
  Encode(dtype, code, 0, value);
  return Decode(dtype, code, 0);
}

}  // namespace ascend_sim
