// Runs an AOTInductor package by torch alone: PACKAGE, then files of float32 values, of which each is a row of 8.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>

int main(int count, char** arguments) {
    c10::InferenceMode mode;
    torch::inductor::AOTIModelPackageLoader loader(arguments[1]);
    for (int i = 2; i < count; ++i) {
        std::ifstream file(arguments[i], std::ios::binary);
        const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        auto values = torch::from_blob(const_cast<char*>(bytes.data()), {long(bytes.size() / 32), 8}, torch::kFloat32);
        auto results = loader.run({values});
        auto flat = results.at(0).contiguous().view({-1});
        for (long at = 0; at < flat.numel(); ++at) std::cout << flat[at].item<float>() << "\n";
    }
}
