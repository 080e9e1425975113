#include "faults.h"

#include <cctype>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace ascend_sim {
namespace {

// Reads the small part of JSON that a fault plan needs: a list of flat objects of strings, integers and null.
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  std::vector<Fault> ReadPlan() {
    std::vector<Fault> faults;
    Expect('[');
    if (!Accept(']')) {
      do faults.push_back(ReadFault());
      while (Accept(','));
      Expect(']');
    }
    return faults;
  }

 private:
  [[noreturn]] void Fail(const std::string& expected) const {
    throw std::invalid_argument("fault plan: expected " + expected + " at character " + std::to_string(at_));
  }

  char Peek() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool Accept(char wanted) {
    if (Peek() != wanted) return false;
    ++at_;
    return true;
  }

  void Expect(char wanted) {
    if (!Accept(wanted)) Fail(std::string("'") + wanted + "'");
  }

  std::string ReadString() {
    Expect('"');
    std::string value;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] == '\\') ++at_;
      if (at_ < text_.size()) value += text_[at_++];
    }
    Expect('"');
    return value;
  }

  int64_t ReadInteger() {
    Peek();
    const char* start = text_.c_str() + at_;
    char* end = nullptr;
    const int64_t value = std::strtoll(start, &end, 10);
    if (end == start) Fail("an integer");
    at_ += end - start;
    return value;
  }

  std::optional<std::string> ReadStringOrNull() {
    if (Peek() == '"') return ReadString();
    if (text_.compare(at_, 4, "null") != 0) Fail("a string or null");
    at_ += 4;
    return std::nullopt;
  }

  Fault ReadFault() {
    Fault fault;
    Expect('{');
    do ReadMember(fault);
    while (Accept(','));
    Expect('}');
    if (fault.code == 0) Fail("a fault with a \"code\" that is not 0");
    return fault;
  }

  void ReadMember(Fault& fault) {
    const std::string key = ReadString();
    Expect(':');
    if (key == "call") {
      fault.call = ReadString();
    } else if (key == "nth") {
      fault.nth = ReadInteger();
    } else if (key == "code") {
      fault.code = static_cast<int32_t>(ReadInteger());
    } else if (key == "message") {
      fault.message = ReadStringOrNull();
    } else if (key == "when") {
      const std::string when = ReadString();
      if (when != "call" && when != "async") Fail("\"call\" or \"async\" before");
      fault.is_async = when == "async";
    } else if (key == "device") {
      fault.device = ReadInteger();
    } else {
      Fail("one of the keys call, nth, code, message, when, device before");
    }
  }

  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace

std::vector<Fault> ParseFaults(const std::string& text) { return Reader(text).ReadPlan(); }

void FaultPlan::Set(std::vector<Fault> faults) {
  std::lock_guard<std::mutex> lock(mutex_);
  faults_ = std::move(faults);
}

void FaultPlan::Record() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_recording_ = true;
  recorded_.clear();
}

std::vector<std::pair<std::string, bool>> FaultPlan::recorded() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_recording_ = false;
  return recorded_;
}

std::optional<Fault> FaultPlan::Next(const std::string& call, int32_t device, bool is_async) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_recording_) recorded_.emplace_back(call, is_async);
  std::optional<Fault> found;
  for (Fault& fault : faults_) {
    const bool is_meant = fault.is_async == is_async && (fault.call == "*" || fault.call == call) &&
                          (fault.device < 0 || fault.device == device);
    if (is_meant && ++fault.num_seen == fault.nth && !found) found = fault;
  }
  return found;
}

}  // namespace ascend_sim
