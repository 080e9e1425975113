#include "loader.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>

#include "errors.h"

namespace deepinfer::ascend {
namespace {

constexpr const char* kRuntimeLibrary = "libascendcl.so";
constexpr const char* kCollectiveLibrary = "libhccl.so";
constexpr const char* kOldOperatorLibrary = "libopapi.so";
constexpr const char* kOperatorLibraries[] = {"libopapi_math.so", "libopapi_nn.so", "libopapi_cv.so",
                                              "libopapi_transformer.so"};

std::string InFolder(const std::string& folder, const std::string& name) {
  return folder.empty() ? name : folder + "/" + name;
}

// The operator libraries of the new layout in a folder, by name; the known four for the default search path.
std::vector<std::string> OperatorNames(const std::string& folder) {
  if (folder.empty()) return {std::begin(kOperatorLibraries), std::end(kOperatorLibraries)};
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (name.rfind("libopapi_", 0) == 0 && entry.path().extension() == ".so") names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

Symbol Lookup(void* library, const std::string& name) {
  void* address = dlsym(library, name.c_str());
  Dl_info where{};
  if (address == nullptr || dladdr(address, &where) == 0) return {};
  return {address, where.dli_fname};
}

}  // namespace

Libraries::Libraries(const LoaderOptions& options) {
  if (!options.simulator.empty()) {
    runtime_ = dlopen(options.simulator.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (runtime_ == nullptr) throw BridgeError(Code::kNotFound, std::string("the Ascend simulator: ") + dlerror());
    is_simulator_ = true;
    operators_.push_back(runtime_);
    paths_.push_back(options.simulator);
    ResolveApi();
    return;
  }
  std::string attempts;
  bool is_found = !options.library_dir.empty() && TryFolder(options.library_dir, attempts);
  is_found = is_found || (!options.home_dir.empty() && TryFolder(options.home_dir + "/lib64", attempts));
  is_found = is_found || TryFolder("", attempts);
  if (!is_found) {
    throw BridgeError(Code::kNotFound, "CANN's libraries were not found (tried" + attempts +
                                           "); install CANN 9.2 and source its set_env.sh, or name their folder in "
                                           "DEEPINFER_JAX_ASCEND_LIBDIR, or ask for the simulator with "
                                           "DEEPINFER_JAX_ASCEND_SIM=1");
  }
  ResolveApi();
}

bool Libraries::TryFolder(const std::string& folder, std::string& attempts) {
  const std::string path = InFolder(folder, kRuntimeLibrary);
  runtime_ = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (runtime_ == nullptr) {
    attempts += (attempts.empty() ? ": " : "; ") + std::string(dlerror());
    return false;
  }
  paths_.push_back(path);
  folder_ = folder;
  OpenOperators(folder);
  return true;
}

void Libraries::OpenOperators(const std::string& folder) {
  for (const std::string& name : OperatorNames(folder)) {
    if (void* library = dlopen(InFolder(folder, name).c_str(), RTLD_NOW | RTLD_GLOBAL)) {
      operators_.push_back(library);
      paths_.push_back(InFolder(folder, name));
    }
  }
  if (!operators_.empty()) return;  // the old library must not be loaded beside the new ones
  const std::string old = InFolder(folder, kOldOperatorLibrary);
  void* library = dlopen(old.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    throw BridgeError(Code::kNotFound, "found " + paths_.front() + " but no operator library beside it: " + dlerror());
  }
  operators_.push_back(library);
  paths_.push_back(old);
}

void Libraries::ResolveApi() {
  std::string missing;
#define DEEPINFER_RESOLVE_RUNTIME(name, type)                                     \
  api_.name = reinterpret_cast<std::add_pointer_t<type>>(dlsym(runtime_, #name)); \
  if (api_.name == nullptr) missing += " " #name;
  DEEPINFER_RUNTIME_FUNCTIONS(DEEPINFER_RESOLVE_RUNTIME)
#undef DEEPINFER_RESOLVE_RUNTIME
#define DEEPINFER_RESOLVE_OBJECT(name, type)                                   \
  api_.name = reinterpret_cast<std::add_pointer_t<type>>(Find(#name).address); \
  if (api_.name == nullptr) missing += " " #name;
  DEEPINFER_OBJECT_FUNCTIONS(DEEPINFER_RESOLVE_OBJECT)
#undef DEEPINFER_RESOLVE_OBJECT
  if (!missing.empty()) {
    throw BridgeError(Code::kUnimplemented, "these functions are missing in " + paths_.front() +
                                                " and its operator libraries:" + missing +
                                                "; the bridge is written for CANN 9.2");
  }
}

const CollectiveApi& Libraries::collectives() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (collective_library_ != nullptr) return collective_api_;
  const std::string path = InFolder(folder_, kCollectiveLibrary);
  void* library = is_simulator_ ? runtime_ : dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw BridgeError(Code::kNotFound, std::string("the library of collectives: ") + dlerror());
  std::string missing;
#define DEEPINFER_RESOLVE_COLLECTIVE(name, type)                                            \
  collective_api_.name = reinterpret_cast<std::add_pointer_t<type>>(dlsym(library, #name)); \
  if (collective_api_.name == nullptr) missing += " " #name;
  DEEPINFER_COLLECTIVE_FUNCTIONS(DEEPINFER_RESOLVE_COLLECTIVE)
#undef DEEPINFER_RESOLVE_COLLECTIVE
  if (!missing.empty()) throw BridgeError(Code::kUnimplemented, path + " lacks these functions:" + missing);
  if (!is_simulator_) paths_.push_back(path);
  collective_library_ = library;
  return collective_api_;
}

Symbol Libraries::Find(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = symbols_.find(name);
  if (known != symbols_.end()) return known->second;
  Symbol found;
  for (void* library : operators_) {
    found = Lookup(library, name);
    if (found.address != nullptr) break;
  }
  return symbols_[name] = found;
}

}  // namespace deepinfer::ascend
