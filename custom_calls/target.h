// What a custom call is made of: names and types of operands, attributes and results, a shape rule with checks, and the
// operator calls. Nothing here depends on XLA; ffi_handlers.cc connects the two.
#pragma once

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "../ascend_bridge/src/call.h"

namespace deepinfer::custom_calls {

using ascend::Call;
using ascend::DataType;
using ascend::Dims;
using ascend::Tensor;

struct Operand {
  const char* name;
  std::vector<DataType> dtypes;
  const char* shape;         // for people: "(T, K)"; the shape rule checks it
  bool is_optional = false;  // only the last ones may be
};

struct Attribute {
  const char* name;
  enum Type { kF64, kI64 } type;
  const char* meaning;
};

struct Result {
  const char* name;
  const char* shape;
};

using AttributeValues = std::map<std::string, std::variant<int64_t, double>>;

struct Target;

// The operands of one call, whose device addresses are set before `enqueue`, and its attributes.
class Request {
 public:
  Request(const Target& target, std::vector<Tensor> inputs, AttributeValues attributes);

  const Tensor& in(size_t index) const { return inputs_[index]; }
  Tensor& in(size_t index) { return inputs_[index]; }
  size_t num_inputs() const { return inputs_.size(); }
  double f64(const char* name) const { return std::get<double>(attributes_.at(name)); }
  int64_t i64(const char* name) const { return std::get<int64_t>(attributes_.at(name)); }

  // Throw INVALID_ARGUMENT with operand, dimension, value and what is allowed.
  void NeedRank(size_t operand, int64_t rank) const;
  void NeedDim(size_t operand, int64_t dim, int64_t wanted, const std::string& why) const;
  void NeedMultiple(size_t operand, int64_t dim, int64_t of) const;
  void NeedSameType(size_t operand, size_t as) const;

  // Throws for the call as a whole, or for an attribute.
  [[noreturn]] void Refuse(const std::string& text) const;

 private:
  [[noreturn]] void Refuse(size_t operand, const std::string& text) const;
  int64_t DimOf(size_t operand, int64_t dim) const;

  const Target& target_;
  std::vector<Tensor> inputs_;
  AttributeValues attributes_;
};

// `results` have their addresses when `enqueue` runs.
struct Target {
  const char* name;  // <project>.<backend>.<op>.v<abi>
  const char* symbol;
  const char* summary;
  std::vector<const char*> operators;
  std::vector<Operand> operands;
  std::vector<Attribute> attributes;
  std::vector<Result> results;
  bool is_in_place;  // result 0 is operand 0, written in place
  std::vector<Tensor> (*infer)(const Request& request);
  void (*enqueue)(const Request& request, Call& call, const std::vector<Tensor>& results);
};

// A result of this type and shape, without an address yet.
Tensor ResultOf(DataType dtype, Dims dims);

// The name of a carrier type as numpy spells it.
const char* NumpyName(DataType dtype);

// Every target; one file for each.
#define DEEPINFER_TARGETS(X) \
  X(Copy)                    \
  X(RmsNorm)                 \
  X(Linear)                  \
  X(QuantizeMxfp8)           \
  X(LinearMxfp8)             \
  X(Rope)                    \
  X(SwigluMxfp8)             \
  X(ScatterRows)             \
  X(Router)                  \
  X(ExpertProducts)          \
  X(Attention)               \
  X(IndexTopK)               \
  X(Psum)                    \
  X(AllGather)               \
  X(ReduceScatter)

#define DEEPINFER_DECLARE_TARGET(name) const Target& name##Target();
DEEPINFER_TARGETS(DEEPINFER_DECLARE_TARGET)
#undef DEEPINFER_DECLARE_TARGET

}  // namespace deepinfer::custom_calls
