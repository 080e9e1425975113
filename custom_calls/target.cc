#include "target.h"

#include <utility>

#include "../ascend_bridge/src/json.h"

namespace deepinfer::custom_calls {
namespace {

using ascend::BridgeError;
using ascend::Code;

std::string NamesOf(const std::vector<DataType>& dtypes) {
  std::string text;
  for (DataType dtype : dtypes) text += (text.empty() ? "" : " or ") + std::string(NumpyName(dtype));
  return text;
}

std::string CountText(size_t least, size_t most) {
  return least == most ? std::to_string(most) : std::to_string(least) + " to " + std::to_string(most);
}

}  // namespace

const char* NumpyName(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat:
      return "float32";
    case DataType::kFloat16:
      return "float16";
    case DataType::kBf16:
      return "bfloat16";
    case DataType::kInt32:
      return "int32";
    case DataType::kUint8:
      return "uint8";
    default:
      return "another type";
  }
}

Tensor ResultOf(DataType dtype, Dims dims) { return {dtype, std::move(dims), nullptr, ascend::Format::kNd, {}, {}}; }

Request::Request(const Target& target, std::vector<Tensor> inputs, AttributeValues attributes)
    : target_(target), inputs_(std::move(inputs)), attributes_(std::move(attributes)) {
  size_t least = 0;
  for (const Operand& operand : target.operands) least += operand.is_optional ? 0 : 1;
  if (inputs_.size() < least || inputs_.size() > target.operands.size()) {
    throw BridgeError(Code::kInvalidArgument, std::string(target.name) + " was given " +
                                                  std::to_string(inputs_.size()) + " operands; it takes " +
                                                  CountText(least, target.operands.size()));
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const std::vector<DataType>& dtypes = target.operands[i].dtypes;
    bool is_allowed = dtypes.empty();  // none listed: any
    for (DataType dtype : dtypes) is_allowed = is_allowed || dtype == inputs_[i].dtype;
    if (!is_allowed) {
      Refuse(i, "has type code " + std::to_string(static_cast<int32_t>(inputs_[i].dtype)) + "; it must be " +
                    NamesOf(dtypes));
    }
  }
}

void Request::Refuse(const std::string& text) const {
  throw BridgeError(Code::kInvalidArgument, std::string(target_.name) + ": " + text);
}

void Request::Refuse(size_t operand, const std::string& text) const {
  Refuse(std::string("operand ") + target_.operands[operand].name + " " + text);
}

int64_t Request::DimOf(size_t operand, int64_t dim) const {
  const Dims& dims = inputs_[operand].dims;
  return dims[dim < 0 ? dim + static_cast<int64_t>(dims.size()) : dim];
}

void Request::NeedRank(size_t operand, int64_t rank) const {
  const auto given = static_cast<int64_t>(inputs_[operand].dims.size());
  if (given != rank) {
    Refuse(operand, "has " + std::to_string(given) + " dimensions; it must be " + target_.operands[operand].shape);
  }
}

void Request::NeedDim(size_t operand, int64_t dim, int64_t wanted, const std::string& why) const {
  const int64_t given = DimOf(operand, dim);
  if (given != wanted) {
    Refuse(operand, "dimension " + std::to_string(dim) + " is " + std::to_string(given) + "; it must be " +
                        std::to_string(wanted) + ", " + why);
  }
}

void Request::NeedMultiple(size_t operand, int64_t dim, int64_t of) const {
  const int64_t given = DimOf(operand, dim);
  if (given == 0 || given % of != 0) {
    Refuse(operand, "dimension " + std::to_string(dim) + " is " + std::to_string(given) +
                        "; it must be a positive multiple of " + std::to_string(of));
  }
}

void Request::NeedSameType(size_t operand, size_t as) const {
  if (inputs_[operand].dtype != inputs_[as].dtype) {
    Refuse(operand, std::string("is ") + NumpyName(inputs_[operand].dtype) + "; it must be " +
                        NumpyName(inputs_[as].dtype) + " like " + target_.operands[as].name);
  }
}

namespace {

std::string OperandJson(const Operand& operand) {
  const std::string types = operand.dtypes.empty() ? "any" : NamesOf(operand.dtypes);
  return "{\"name\": " + Quoted(operand.name) + ", \"dtypes\": " + Quoted(types) +
         ", \"shape\": " + Quoted(operand.shape) + ", \"is_optional\": " + (operand.is_optional ? "true" : "false") +
         "}";
}

std::string TargetJson(const Target& target) {
  std::vector<std::string> operators, operands, attributes, results;
  for (const char* name : target.operators) operators.push_back(Quoted(name));
  for (const Operand& operand : target.operands) operands.push_back(OperandJson(operand));
  for (const Attribute& attribute : target.attributes) {
    attributes.push_back("{\"name\": " + Quoted(attribute.name) +
                         ", \"type\": " + Quoted(attribute.type == Attribute::kF64 ? "float64" : "int64") +
                         ", \"meaning\": " + Quoted(attribute.meaning) + "}");
  }
  for (const Result& result : target.results) {
    results.push_back("{\"name\": " + Quoted(result.name) + ", \"shape\": " + Quoted(result.shape) + "}");
  }
  return "{\"name\": " + Quoted(target.name) + ", \"symbol\": " + Quoted(target.symbol) +
         ", \"summary\": " + Quoted(target.summary) + ", \"operators\": " + JsonList(operators) +
         ", \"operands\": " + JsonList(operands) + ", \"attributes\": " + JsonList(attributes) +
         ", \"results\": " + JsonList(results) + ", \"is_in_place\": " + (target.is_in_place ? "true" : "false") + "}";
}

}  // namespace

}  // namespace deepinfer::custom_calls

// Every target with its operands, attributes, results and operators; needs no open bridge. The text is never freed.
extern "C" __attribute__((visibility("default"))) const char* deepinfer_target_table() {
  using namespace deepinfer::custom_calls;
  static const std::string text = [] {
    std::vector<std::string> targets;
#define DEEPINFER_ADD_TARGET(name) targets.push_back(TargetJson(name##Target()));
    DEEPINFER_TARGETS(DEEPINFER_ADD_TARGET)
#undef DEEPINFER_ADD_TARGET
    return deepinfer::JsonList(targets);
  }();
  return text.c_str();
}
